// Github-app authenticates requests as a GitHub App, by a JWT that the app's
// private key signs.
package main

import (
	"encoding/base64"
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/doze-run/doze/policies/sdk"
)

type config struct {
	// App is the app's client ID or its number.
	App string `json:"app"`
	// InstallationTokens permits the sandbox to create such tokens, which it then has.
	InstallationTokens bool `json:"installation_tokens"`
}

func init() { sdk.Serve(build) }

func main() {}

const (
	// GitHub accepts lifetimes up to ten minutes, and advises to backdate the JWT by one
	// minute because clocks differ.
	lifetime = 9 * time.Minute
	backdate = time.Minute
)

// header of the JWT, which never changes.
var header = encode([]byte(`{"alg":"RS256","typ":"JWT"}`))

func encode(b []byte) string { return base64.RawURLEncoding.EncodeToString(b) }

const appCharacters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"

func build(c config) (sdk.Policy, error) {
	if c.App == "" || strings.Trim(c.App, appCharacters) != "" {
		return sdk.Policy{}, errors.New(`"app" is the app's client ID, such as "Iv23liAbCdEf", or its number as text`)
	}
	return sdk.Policy{Request: func(r *sdk.Request) error {
		if !c.InstallationTokens && makesToken(r) {
			return sdk.Deny(`installation tokens would be a credential inside the sandbox; "installation_tokens" allows them`)
		}
		// A JWT for each request, which takes the node about a millisecond: the same instance
		// may serve another rule, with another key or for another host.
		now := sdk.Now()
		claims := `{"iat":` + seconds(now.Add(-backdate)) + `,"exp":` + seconds(now.Add(lifetime)) + `,"iss":"` + c.App + `"}`
		signed := header + "." + encode([]byte(claims))
		signature, err := sdk.Sign("private_key", sdk.RS256, []byte(signed))
		if err != nil {
			return err
		}
		r.Header.Set("Authorization", "Bearer "+signed+"."+encode(signature))
		return nil
	}}, nil
}

func seconds(t time.Time) string { return strconv.FormatInt(t.Unix(), 10) }

// makesToken reports whether the response to the request might be a token,
// POST /app/installations/ID/access_tokens, in any spelling.
func makesToken(r *sdk.Request) bool {
	method := r.Method()
	if method == "GET" || method == "HEAD" {
		return false
	}
	path := strings.ToLower(r.Path())
	return strings.Contains(path, "access_token") || strings.Contains(path, "%")
}
