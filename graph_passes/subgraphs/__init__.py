"""What was found: subgraphs, their weights and biases."""
