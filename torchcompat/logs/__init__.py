"""What a log says: `torchcompat explain LOG`."""
