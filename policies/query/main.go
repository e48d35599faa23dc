// Query puts a secret into a parameter of the query.
package main

import (
	"errors"
	"net/url"
	"strings"

	"github.com/doze-run/doze/policies/sdk"
)

type config struct {
	Name string `json:"name"`
}

func init() { sdk.Serve(build) }

func main() {}

func build(c config) (sdk.Policy, error) {
	if c.Name == "" {
		return sdk.Policy{}, errors.New(`"name" is missing: the parameter's`)
	}
	escaped := url.QueryEscape(c.Name)
	return sdk.Policy{Request: func(r *sdk.Request) error {
		value, err := sdk.Secret("value")
		if err != nil {
			return err
		}
		if value, err = sdk.Encode(sdk.Percent, value); err != nil {
			return err
		}
		path, query, _ := strings.Cut(r.URI(), "?")
		if query = without(query, c.Name); query != "" {
			query += "&"
		}
		r.SetURI(path + "?" + query + escaped + "=" + value)
		return nil
	}}, nil
}

// without returns the query without a parameter, however its name is escaped. Other
// parameters stay as they were sent.
func without(query, name string) string {
	var pairs []string
	for pair := range strings.SplitSeq(query, "&") {
		key, _, _ := strings.Cut(pair, "=")
		if unescaped, err := url.QueryUnescape(key); pair != "" && (err != nil || unescaped != name) {
			pairs = append(pairs, pair)
		}
	}
	return strings.Join(pairs, "&")
}
