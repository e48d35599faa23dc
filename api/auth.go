package api

import (
	"crypto/sha256"
	"crypto/subtle"
	"net/http"
	"strings"

	"github.com/doze-run/doze/problem"
)

// Authenticator decides whose request it is. It is called for every request and
// must compare in constant time.
type Authenticator interface {
	Authenticate(token string) (owner string, ok bool)
}

// SingleToken accepts one token, whose bearer is owner. It keeps a hash only.
func SingleToken(token, owner string) Authenticator {
	return singleToken{hash: sha256.Sum256([]byte(token)), owner: owner, set: token != ""}
}

type singleToken struct {
	hash  [sha256.Size]byte
	owner string
	set   bool // an empty token never authenticates anybody
}

func (s singleToken) Authenticate(token string) (string, bool) {
	hash := sha256.Sum256([]byte(token))
	same := subtle.ConstantTimeCompare(hash[:], s.hash[:]) == 1
	return s.owner, same && s.set
}

// maxToken is longer than any token and short enough to hash for anybody.
const maxToken = 4096

// authenticate returns whose request it is, or the refusal.
func (a *API) authenticate(r *http.Request) (string, *problem.Problem) {
	header := r.Header.Get("Authorization")
	if header == "" {
		return "", problem.Newf(problem.Unauthorized, "the request has no token; send the header Authorization: Bearer TOKEN").
			WithHeader("WWW-Authenticate", `Bearer realm="doze"`)
	}
	scheme, token, _ := strings.Cut(header, " ")
	if strings.EqualFold(scheme, "Bearer") && len(token) <= maxToken {
		if owner, ok := a.auth.Authenticate(strings.TrimSpace(token)); ok {
			return owner, nil
		}
	}
	return "", problem.Newf(problem.Unauthorized, "the token is not valid; send the header Authorization: Bearer TOKEN with this node's token").
		WithHeader("WWW-Authenticate", `Bearer realm="doze", error="invalid_token"`)
}
