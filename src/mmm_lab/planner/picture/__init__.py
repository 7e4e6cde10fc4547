"""The picture of a layout: what each rank holds, what it sends, and when."""
