"""What went through this hop, as digests, and the reports on them for audits. Imports no other folder of the node."""
