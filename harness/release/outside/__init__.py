"""What other programs say of a checkpoint: other versions, a server, tasks, and commands of the policy. None of them is imported."""
