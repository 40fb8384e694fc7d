"""THE SHOP: serves a bundle. Desk (request … sampling), machine (executors), door (loop … server)."""
