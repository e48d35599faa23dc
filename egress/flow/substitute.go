package flow

import (
	"errors"
	"io"
	"net/http"

	"github.com/doze-run/doze/egress/http/intercept"
	"github.com/doze-run/doze/egress/secret"
	"github.com/doze-run/doze/egress/secret/placeholder"
	"github.com/doze-run/doze/problem"
)

// errNotOffered refuses a placeholder whose secret exists.
var errNotOffered = errors.New("no rule that permits this request offers it")

// substitute replaces placeholders by secrets. An error is a *placeholder.RefusedError, or
// of reading the body.
func (q *request) substitute(r *http.Request) (err error) {
	if len(q.table.Offers) == 0 {
		return nil
	}
	value := func(id secret.ID) ([]byte, error) {
		for _, o := range q.decision.Offers {
			if q.table.SecretOf(o) == id {
				return q.secrets.Value(id)
			}
		}
		return nil, errNotOffered
	}
	q.exchanged, err = placeholder.NewSet(q.table.Offers, value, q.holdBody).Exchange(r)
	if q.exchanged != nil && r.Body != nil {
		r.Body = refusable{r.Body}
	}
	return err
}

// holdBody acquires memory for a body until the request ends.
func (q *request) holdBody(bytes int64) bool {
	if q.Usage.Bodies.TryAcquire(bytes) != nil {
		return false
	}
	q.heldBodies += bytes
	return true
}

func (q *request) releaseBodies() { q.Usage.Bodies.Release(q.heldBodies) }

// refusable is a body in which a placeholder may be found that is refused. Its error is
// for the client.
type refusable struct{ io.ReadCloser }

func (b refusable) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if _, ok := errors.AsType[*placeholder.RefusedError](err); ok {
		err = &intercept.Failure{Code: problem.PlaceholderNotAllowed, Reason: err.Error(), Err: err, Denied: true}
	}
	return n, err
}
