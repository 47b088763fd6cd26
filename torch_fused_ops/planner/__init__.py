"""``plan``: choose the memory levels with which a training step fits into a GPU's memory at the least cost.

setup.py        the settings of a plan, checked without importing torch
model.py        a captured model: its graphs, its layers, its MLPs
pieces.py       the model divided into pieces, compiled or in eager mode
estimate.py     a quick estimate: equal layers are compiled once
step.py         the memory and the time of a step, cut at its layers
fsdp.py         bytes that FSDP2's shards add to it
static_memory.py  resident memory: parameters, gradients, optimizer state, or shards of them
max_batch.py    the largest batch or sequence that fits
search.py       the levels to choose among, and the choice
plan.py         the call
report.py       the result, as text and as a page
segments.py     parts of a step's live-bytes timeline
"""
