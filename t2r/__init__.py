"""t2r: turn a pretrained transformer into a recurrent network (Kasai et al., 2021)."""
