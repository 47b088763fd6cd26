"""``plan``: choose the cheapest memory levels with which a training step fits into a GPU's memory."""
