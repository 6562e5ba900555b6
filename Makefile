test:
	true
