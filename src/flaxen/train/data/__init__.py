"""What is learned from: documents, tokens, rows, batches."""
