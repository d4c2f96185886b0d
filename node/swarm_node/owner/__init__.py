"""What the person who lends the machine decides and sees: pauses, hours, events, vitals, metrics."""
