"""The bytes that ranks send: counted, and by formula."""
