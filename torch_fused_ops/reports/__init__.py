"""What pick-up does to a model, for people: reports as objects, text, JSON and a page, and the figures in them."""
