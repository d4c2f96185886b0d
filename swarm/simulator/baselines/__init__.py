"""Other systems' rules as policies, as good as their papers and sources describe them; one file each."""
