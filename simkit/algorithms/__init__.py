"""One file per algorithm of the documents, written against the machine."""
