"""Plain ``nn.Module`` models. They import nothing else from mmm."""
