"""Rewards in the box. Each is an edge like a user's own: `function = "miles_hpc.rewards.exact:match"` in the configuration."""
