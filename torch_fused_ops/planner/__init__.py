"""``plan``: whether a step of training fits into a GPU's memory, and which memory levels make it fit at the least cost.

model.py        a captured model: its graphs, its layers, its MLPs
step.py         the memory and the time of a step, cut at its layers
fsdp.py         what is alive beside it where FSDP2 has the parameters in shards
tensor_parallel.py  the captured model as one GPU of a tensor-parallel group has it
static_memory.py     what a GPU holds all the time: parameters, gradients, optimizer state, or shards of them
max_batch.py      the largest batch or sequence that fits
search.py       the levels to choose among, and the choice
optimizers.py   what an optimizer keeps and needs
plan.py         the call, and its result
"""
