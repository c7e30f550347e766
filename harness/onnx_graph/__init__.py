"""ONNX round-trips by role: which weight is Q, K and V, whether an optimizer kept them apart, and which pass took them.

The folder is not called `onnx`, which would hide the library of that name.
"""
