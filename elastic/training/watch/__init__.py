"""What watches the numbers of each step: non-finite losses and gradients, and ranks that compute wrong ones."""
