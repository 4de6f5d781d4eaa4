"""Models larger than a device: built without memory, sized, placed, loaded and streamed."""
