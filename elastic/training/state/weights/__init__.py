"""The model's weights as whole tensors: read into what ranks have of them, and gathered from there."""
