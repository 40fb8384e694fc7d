"""THE YARD: makes bundles, offline; the only room with torch, onnx and transformers."""
