"""``plan``: choose the cheapest memory levels with which a training step fits into a GPU's memory.

setup.py        the settings of a plan, checked without importing torch
model.py        a captured model: its graphs, its layers, its MLPs
pieces.py       the model divided into pieces, compiled or in eager mode
step.py         a step's memory and time, split into segments at layer boundaries
fsdp.py         a step's segments, and the bytes that FSDP2 adds to them
static_memory.py  parameters, gradients and optimizer state, whole or sharded
max_batch.py    the largest batch or sequence that fits
search.py       the candidates, and the choice of the fastest that fits
processes.py    compile independent rows in several processes
plan.py         the function ``plan``
report.py       a plan's figures, as text, JSON and a page
"""
