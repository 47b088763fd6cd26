"""``plan``: whether a step of training fits into a GPU's memory, and which memory levels make it fit at the least cost.

model.py        what is compiled in the model's place: with few of its equal layers
step.py         the memory and the time of a step, put together from the layers' own
fsdp.py         what is alive beside it where FSDP2 has the parameters in shards
tensor_parallel.py  the captured model as one GPU of a tensor-parallel group has it
resident.py     what a GPU holds all the time: parameters, gradients, optimizer state, or shards of them
largest.py      the largest batch or sequence that fits
search.py       the levels to choose among, and the choice
optimizers.py   what an optimizer keeps and needs
plan.py         the call, and its result
"""
