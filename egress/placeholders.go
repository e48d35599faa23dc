package egress

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"

	"github.com/doze-run/doze/egress/http/intercept"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/secret"
	"github.com/doze-run/doze/egress/secret/placeholder"
	"github.com/doze-run/doze/egress/secret/seal"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
)

// keysKind is the kind of the documents that hold the node's sealed keys;
// placeholderKey is the one that placeholders are made with.
const (
	keysKind       = "keys"
	placeholderKey = "placeholder"
)

// openPlaceholderKey reads the key of placeholders, or makes it. A value that an old key
// has sealed is sealed again.
func (e *Egress) openPlaceholderKey(ctx context.Context) error {
	record := seal.Document{Store: e.cfg.Documents, Key: e.key, Kind: keysKind, Name: placeholderKey}
	key, old, err := record.Read(ctx)
	if err != nil {
		return fmt.Errorf("read the key of placeholders: %w", err)
	}
	e.placeholderKey = key
	if key == nil {
		e.placeholderKey = make([]byte, 32)
		rand.Read(e.placeholderKey)
	}
	if key != nil && !old {
		return nil
	}
	if err := record.Write(ctx, e.placeholderKey); err != nil && key == nil {
		return fmt.Errorf("write the key of placeholders: %w", err)
	} else if err != nil {
		e.log.Error("failed to seal the key of placeholders with the new key; keep the old one", "error", err)
	}
	return nil
}

// secretOf returns the secret that a rule offers to a sandbox.
func (e *Egress) secretOf(m *sender, o rule.Offer) secret.ID {
	if o.Source == rule.Node {
		return secret.ID{Owner: e.cfg.Operator, Name: o.Secret}
	}
	return secret.ID{Owner: m.owner, Name: o.Secret}
}

// offer returns the placeholder of the secret that a rule offers to a sandbox.
func (e *Egress) offer(m *sender, o rule.Offer) placeholder.Offer {
	id := e.secretOf(m, o)
	return placeholder.Offer{Secret: id, Text: placeholder.Text(e.placeholderKey, m.name()+"/"+id.Owner, id.Name)}
}

// fill adds the placeholders to a sandbox's table.
func (t *table) fill(e *Egress, m *sender) {
	t.environment = map[string]string{}
	for variable, o := range t.Placeholders() {
		p := e.offer(m, o)
		t.environment[variable] = p.Text
		if !slices.Contains(t.offers, p) {
			t.offers = append(t.offers, p)
		}
	}
}

// Environment implements sandbox.Uplink: the placeholders that rules offer.
func (e *Egress) Environment(id sandbox.ID) map[string]string {
	if m := e.find(id); m != nil {
		return m.table.Load().environment
	}
	return nil
}

// errNotOffered is why a placeholder is refused although its secret is there.
var errNotOffered = errors.New("no rule that permits this request offers it")

// exchangePlaceholders puts secrets in the place of their placeholders. A
// placeholder that must not go to this host is an error.
func (x *exchange) exchangePlaceholders(r *http.Request) (err error) {
	if len(x.table.offers) == 0 {
		return nil
	}
	offered := func(id secret.ID) ([]byte, error) {
		for _, o := range x.decided.Offers {
			if x.m.e.secretOf(x.m, o) == id {
				return x.secrets.Value(id)
			}
		}
		return nil, errNotOffered
	}
	x.exchanged, err = placeholder.NewSet(x.table.offers, offered, x.hold).Exchange(r)
	if x.exchanged != nil && r.Body != nil {
		r.Body = refusable{r.Body}
	}
	return err
}

// refusable is a body that may turn out to have a placeholder in it which is
// refused: its error is one for the client.
type refusable struct{ io.ReadCloser }

func (b refusable) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	var refused *placeholder.RefusedError
	if errors.As(err, &refused) {
		err = &intercept.RefusedError{Code: problem.PlaceholderNotAllowed, Reason: err.Error(), Err: err}
	}
	return n, err
}
