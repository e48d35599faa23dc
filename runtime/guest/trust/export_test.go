package trust

// UpdateKeystore adds the CAs to one of Java's stores, for fuzzing without files.
func UpdateKeystore(store, ca []byte) ([]byte, error) {
	certs, err := parse(ca)
	if err != nil {
		return nil, err
	}
	return updateKeystore(store, certs, nil)
}

// Sealed gives what would be a JKS store the sum that makes it one.
func Sealed(body []byte) []byte {
	body = append(jksMagic[:len(jksMagic):len(jksMagic)], body...)
	return append(body, jksSum(body)...)
}
