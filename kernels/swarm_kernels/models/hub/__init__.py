"""Files of a Hugging Face hub: listed, read in part, fetched, verified and kept. What is in them is not known here."""
