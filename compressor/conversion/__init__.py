"""Compression without any forward: from the files of a model to those of its compressed form, tensor by tensor."""
