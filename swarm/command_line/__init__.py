"""What all programs of the package have in common on their command lines."""
