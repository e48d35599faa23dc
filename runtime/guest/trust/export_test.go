package trust

// UpdateKeystore changes the CAs in one of Java's stores, for fuzzing without files.
func UpdateKeystore(store, ca, stale []byte) ([]byte, error) {
	certs, err := parse(ca)
	if err != nil {
		return nil, err
	}
	old, err := parse(stale)
	if err != nil {
		return nil, err
	}
	return updateKeystore(store, certs, old)
}
