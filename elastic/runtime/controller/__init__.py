"""The controller actor: senses report events, the loop decides, hands act."""
