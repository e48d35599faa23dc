package ca

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/doze-run/doze/egress/secret/seal"
)

const day = 24 * time.Hour

const (
	// rootLife is the validity of a root: short enough that a leaked key is of use
	// for a limited time, and long enough that renewals are rare.
	rootLife = 2 * 365 * day
	// overlap is how long before its expiry a root gets a successor. Sandboxes
	// receive the roots when they start: one that runs or sleeps for longer than
	// overlap-handover trusts only the old root, and must be restarted.
	overlap = 180 * day
	// handover is how long before its expiry a root stops signing: longer than the
	// validity of its leaves.
	handover = 30 * day
	// backdate is for clients whose clock is slow: a sandbox that was frozen sees
	// the right time, one in a virtual machine may not.
	backdate = time.Hour
)

// root is a root certificate of the authority, with its key.
type root struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// roots are the content of the record, and the values derived from it.
type roots struct {
	all    []root    // oldest first
	bundle []byte    // PEM of all
	due    time.Time // time of the next change
}

// encodedRoot is the encoding of a root in the record.
type encodedRoot struct {
	Certificate []byte `json:"certificate"` // DER
	Key         []byte `json:"key"`         // PKCS #8
}

func newRoots(all []root) *roots {
	r := &roots{all: all}
	var b bytes.Buffer
	for _, one := range all {
		pem.Encode(&b, &pem.Block{Type: "CERTIFICATE", Bytes: one.cert.Raw}) // never fails: writes to memory
	}
	r.bundle = b.Bytes()
	switch len(all) {
	case 0:
	case 1:
		r.due = all[0].cert.NotAfter.Add(-overlap) // it gets a successor
	default:
		r.due = all[0].cert.NotAfter // it is removed
	}
	return r
}

// signer returns the root that signs now: the oldest that does not expire soon.
func (r *roots) signer(now time.Time) root {
	for _, one := range r.all {
		if now.Before(one.cert.NotAfter.Add(-handover)) {
			return one
		}
	}
	return r.all[len(r.all)-1]
}

// load reads the roots of the record. Without a record it returns none.
func (a *Authority) load(ctx context.Context) ([]root, error) {
	plain, err := a.record.Read(ctx)
	switch {
	case errors.Is(err, seal.ErrOtherKey) || errors.Is(err, seal.ErrBroken):
		return nil, fmt.Errorf("open the egress CA, which was stored under another key (if that key is lost, remove the record %q and start all sandboxes again): %w", documentName, err)
	case err != nil:
		return nil, fmt.Errorf("read the egress CA: %w", err)
	case plain == nil:
		return nil, nil
	}
	var record []encodedRoot
	if err := json.Unmarshal(plain, &record); err != nil {
		return nil, fmt.Errorf("read the egress CA: %w", err)
	}
	var all []root
	for _, encoded := range record {
		cert, errCert := x509.ParseCertificate(encoded.Certificate)
		key, errKey := x509.ParsePKCS8PrivateKey(encoded.Key)
		if err := errors.Join(errCert, errKey); err != nil {
			return nil, fmt.Errorf("read the egress CA: %w", err)
		}
		private, ok := key.(*ecdsa.PrivateKey)
		if !ok || !private.PublicKey.Equal(cert.PublicKey) {
			return nil, fmt.Errorf("read the egress CA: %s and its key do not match", cert.Subject.CommonName)
		}
		all = append(all, root{cert, private})
	}
	return all, nil
}

func (a *Authority) save(ctx context.Context, all []root) error {
	record := make([]encodedRoot, len(all))
	var errs []error
	for i, one := range all {
		key, err := x509.MarshalPKCS8PrivateKey(one.key)
		record[i], errs = encodedRoot{one.cert.Raw, key}, append(errs, err)
	}
	plain, err := json.Marshal(record)
	if err = errors.Join(append(errs, err)...); err == nil {
		err = a.record.Write(ctx, plain)
	}
	if err != nil {
		return fmt.Errorf("write the egress CA: %w", err)
	}
	return nil
}

// renew removes expired roots, and makes one if the newest needs a successor. A new root
// is stored before any caller can get it.
func (a *Authority) renew(ctx context.Context) error {
	a.renewing.Lock()
	defer a.renewing.Unlock()
	now := a.cfg.Now()
	old := a.roots.Load().all
	all := slices.DeleteFunc(slices.Clone(old), func(r root) bool { return !now.Before(r.cert.NotAfter) })
	made := len(all) == 0 || !now.Before(all[len(all)-1].cert.NotAfter.Add(-overlap))
	if made {
		one, err := newRoot(now)
		if err != nil {
			return fmt.Errorf("make the egress CA: %w", err)
		}
		all = append(all, one)
	}
	if !made && len(all) == len(old) { // another caller was first
		return nil
	}
	if err := a.save(ctx, all); err != nil {
		return err
	}
	if made {
		one := all[len(all)-1].cert
		a.cfg.Log.Info("created an egress CA", "subject", one.Subject.CommonName, "ends", one.NotAfter, "roots", len(all))
	}
	a.roots.Store(newRoots(all))
	return nil
}

// newRoot returns a new root. Its name contains a part of its key's hash: clients
// find issuers by name, and two issuers with the same name confuse some of them.
func newRoot(now time.Time) (root, error) {
	key, id, err := newKey()
	if err != nil {
		return root{}, err
	}
	template := &x509.Certificate{
		Subject:               pkix.Name{CommonName: "doze egress CA " + hex.EncodeToString(id[:4])},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(rootLife),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true, // it signs leaves only
		SubjectKeyId:          id,
	}
	cert, err := sign(template, template, &key.PublicKey, key)
	return root{cert, key}, err
}
