"""What ``torch.optim`` has not: LARS, LAMB and Muon, and loss scaling, right on sharded tensors."""
