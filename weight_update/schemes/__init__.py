"""The TorchRL face: schemes, senders and transports that only assemble."""
