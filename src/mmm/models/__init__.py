"""Plain ``nn.Module`` models: they know no mesh."""
