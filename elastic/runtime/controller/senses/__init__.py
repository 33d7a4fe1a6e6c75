"""What the controller learns of its cluster: broken links, drains, capacity."""
