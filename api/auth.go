package api

import (
	"crypto/sha256"
	"crypto/subtle"
	"net/http"
	"strings"

	"github.com/doze-run/doze/problem"
)

// SingleToken returns a Config.Auth that accepts one token, whose bearer is owner. It
// stores only a hash. An empty token authenticates no request.
func SingleToken(token, owner string) func(token string) (string, bool) {
	want := sha256.Sum256([]byte(token))
	return func(sent string) (string, bool) {
		hash := sha256.Sum256([]byte(sent))
		same := subtle.ConstantTimeCompare(hash[:], want[:]) == 1
		return owner, same && token != ""
	}
}

// TokenGeneration returns the generation of the credentials of a node with one token, for
// signedurl.New: another token is another generation. It does not reveal the token.
func TokenGeneration(token string) func(owner string) []byte {
	sum := sha256.Sum256([]byte("doze generation of credentials\x00" + token))
	return func(string) []byte { return sum[:] }
}

// maxToken is longer than any token, and short enough to hash for any client.
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
		if owner, ok := a.cfg.Auth(strings.TrimSpace(token)); ok {
			return owner, nil
		}
	}
	return "", problem.Newf(problem.Unauthorized, "the token is not valid; send the header Authorization: Bearer TOKEN with this node's token").
		WithHeader("WWW-Authenticate", `Bearer realm="doze", error="invalid_token"`)
}
