package vault

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
)

// documentKind is the kind of the store's documents that hold secrets.
const documentKind = "secrets"

// record is the stored form of a secret. The document's name has the owner.
type record struct {
	Secret
	Sealed []byte `json:"sealed"`
}

// documentName is owner/name. Names have no slash, so the last one divides.
func documentName(owner, name string) string { return owner + "/" + name }

// purpose binds a sealed value to the rest of its record: write access to the store does
// not suffice to give a secret to another owner or host, or to bring an older value back
// under the newer version. Only the owner can have a slash in it.
func purpose(owner string, e *entry) string {
	return strings.Join([]string{"secret", owner, e.Name, strconv.FormatInt(e.Version, 10), strings.Join(e.Hosts, ",")}, "/")
}

// store seals the entry and writes it.
func (v *Vault) store(ctx context.Context, owner string, e *entry) error {
	sealed, err := v.key.Seal(purpose(owner, e), e.value)
	if err != nil {
		return err
	}
	value, err := json.Marshal(record{e.Secret, sealed})
	if err != nil {
		return err
	}
	return v.docs.PutDocument(ctx, documentKind, documentName(owner, e.Name), value)
}

// load reads a stored secret. With an error the entry is unreadable, or nil if its name is
// unknown. A value that an old key has sealed is sealed again.
func (v *Vault) load(ctx context.Context, document string, value []byte) (owner string, _ *entry, _ error) {
	cut := strings.LastIndexByte(document, '/')
	if cut < 0 {
		return "", nil, fmt.Errorf("the stored secret %q names no owner", document)
	}
	owner, name := document[:cut], document[cut+1:]
	e, sealed, err := decode(name, value)
	if err == nil {
		e.value, err = v.key.Open(purpose(owner, e), sealed)
	}
	if err != nil {
		e.Unreadable, e.value = true, nil
		return owner, e, fmt.Errorf("the secret %s of %s cannot be used, put it again: %w", name, owner, err)
	}
	if v.key.Old(sealed) {
		if err := v.store(ctx, owner, e); err != nil {
			return owner, e, fmt.Errorf("the secret %s of %s is still sealed with an old key: %w", name, owner, err)
		}
	}
	return owner, e, nil
}

// decode reads a record. The entry has its name even when there is an error.
func decode(name string, value []byte) (*entry, []byte, error) {
	e := &entry{Secret: Secret{Name: name, Hosts: []string{}}}
	var r record
	dec := json.NewDecoder(bytes.NewReader(value))
	dec.DisallowUnknownFields() // a newer doze may have bound it closer
	if err := dec.Decode(&r); err != nil {
		return e, nil, fmt.Errorf("its record cannot be read: %w", err)
	}
	if r.Name != name {
		return e, nil, fmt.Errorf("its record has the name %.80q", r.Name)
	}
	patterns, err := parsePatterns(r.Hosts)
	if err != nil {
		return e, nil, err
	}
	e.Secret, e.patterns = r.Secret, patterns
	return e, r.Sealed, nil
}
