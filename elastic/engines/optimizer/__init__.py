"""What optimizers keep and step, whichever engine has them."""
