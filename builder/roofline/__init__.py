"""The least times and bytes that a GPU allows for."""
