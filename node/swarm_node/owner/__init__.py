"""What the person who lends the machine decides and sees: pauses, active hours, events, metrics."""
