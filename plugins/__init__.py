"""THE MATH: per operator its schema, the ONNX function body that specifies it, a NumPy oracle and the kernels."""
