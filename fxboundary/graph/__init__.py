"""GraphModule → GraphModule: finding, preparing and printing boundaries."""
