"""The GDPO trainer: config, policy, batch, loss, and the loop in ``train``."""
