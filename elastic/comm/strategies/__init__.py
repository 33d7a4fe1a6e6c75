"""How gradients travel: reductions written out on messages, their measured hops, and the choice between them."""
