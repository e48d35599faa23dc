package seal

import (
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/doze-run/doze/internal/durable"
)

// credential is the name under which systemd hands the key over
// (LoadCredential=doze-seal or LoadCredentialEncrypted=doze-seal, see
// systemd.exec(5)); its folder is in the variable.
const (
	credential         = "doze-seal"
	credentialVariable = "CREDENTIALS_DIRECTORY"
)

const (
	maxFile = 64 << 10
	// maxKeys bounds the lines of all files: each is a key that was in use once.
	maxKeys = 64
)

const header = "# The key that encrypts doze's secrets. Without it they are lost; anyone who can read it can decrypt them.\n" +
	"# One key per line, in base64: the first one encrypts, all of them decrypt. To change the key, add a line at the top.\n"

// Open reads the key that seals: from systemd's credential doze-seal where there is
// one, else from the file, which is made with a new key when it is missing. When
// there are both, the credential's key seals and the file's still open.
//
// A file holds one key a line, 32 bytes in base64; the first seals, all open. It is
// refused when another user than its owner can read it.
func Open(file string) (*Key, error) {
	keys, err := readKeys(file)
	if err != nil {
		return nil, fmt.Errorf("the key that seals: %w", err)
	}
	return newKey(keys)
}

func readKeys(file string) (keys [][]byte, err error) {
	if dir := os.Getenv(credentialVariable); dir != "" {
		// systemd guards that folder itself. It may do so by an access list, which
		// the mode shows as a group's right to read.
		if keys, err = read(filepath.Join(dir, credential), false); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	more, err := read(file, true)
	if missing := errors.Is(err, fs.ErrNotExist); missing && len(keys) == 0 {
		more, err = create(file)
	} else if missing {
		err = nil
	}
	if keys = append(keys, more...); err == nil && len(keys) > maxKeys {
		err = fmt.Errorf("%s: there are %d keys, at most %d are read: remove old ones", file, len(keys), maxKeys)
	}
	return keys, err
}

func read(path string, guarded bool) ([][]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if mode := info.Mode(); guarded && mode.Perm()&0o077 != 0 {
		return nil, fmt.Errorf("%s has mode %#o: run chmod 600, and replace the key if another user may have read it", path, mode.Perm())
	}
	text, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, err
	}
	if len(text) > maxFile {
		return nil, fmt.Errorf("%s has more than %d bytes, so it is not a file of keys", path, maxFile)
	}
	return parse(path, text)
}

// parse returns the keys of a file. Its errors never quote the file.
func parse(path string, text []byte) ([][]byte, error) {
	var keys [][]byte
	number := 0
	for line := range bytes.Lines(text) {
		number++
		line = bytes.TrimSpace(line)
		if len(line) == 0 || line[0] == '#' {
			continue
		}
		key, err := base64.StdEncoding.DecodeString(string(line))
		if err != nil || len(key) != keySize {
			return nil, fmt.Errorf("line %d of %s is not a valid key; write 32 random bytes in base64, as `openssl rand -base64 32` does", number, path)
		}
		keys = append(keys, key)
	}
	if len(keys) == 0 {
		return nil, fmt.Errorf("%s contains no key; restore it from a backup, or remove it if nothing was sealed yet", path)
	}
	return keys, nil
}

// create makes the file with a new key, or reads the one that another process has
// made meanwhile. It is whole and on the disk before it has its name: half a key
// would seal values that could not be opened again.
func create(path string) ([][]byte, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	key := make([]byte, keySize)
	rand.Read(key) // never fails
	err := durable.Write(path, []byte(header+base64.StdEncoding.EncodeToString(key)+"\n"), os.Link)
	if errors.Is(err, fs.ErrExist) {
		return read(path, true)
	}
	return [][]byte{key}, err
}
