package node

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
)

// minToken is the minimum length, in characters, of a token that the operator chose.
const minToken = 32

// readToken returns the token in the file. If the file does not exist, it creates it with
// mode 0600 and a token of 160 random bits.
func readToken(path string) (string, error) {
	b, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		token := "doze_" + strings.ToLower(rand.Text()+rand.Text()[:6])
		return token, writeNew(path, 0o600, []byte(token+"\n"))
	case err != nil:
		return "", fmt.Errorf("read the API token: %w", err)
	}
	token := strings.TrimSpace(string(b))
	if len(token) < minToken {
		return "", fmt.Errorf("the API token in %s has %d characters; use at least %d, or remove the file to have one created", path, len(token), minToken)
	}
	return token, nil
}
