package sdk_test

import (
	"errors"
	"fmt"
	"log"
	"net/http"
	"strings"
	"time"

	"github.com/doze-run/doze/policies/sdk"
	"github.com/doze-run/doze/policies/sdk/sdktest"
)

// start runs the policy of an example. A module only calls sdk.Serve in func init.
func start(request func(*sdk.Request) error) *sdktest.Policy {
	sdk.Serve(func(struct{}) (sdk.Policy, error) { return sdk.Policy{Request: request}, nil })
	p, err := sdktest.Start("")
	if err != nil {
		log.Fatal(err)
	}
	return p
}

// A policy that authenticates requests with a token that the sandbox never sees.
func Example() {
	p := start(func(r *sdk.Request) error {
		token, err := sdk.Secret("token")
		if err != nil {
			return err
		}
		r.Header.Set("Authorization", "Bearer "+token)
		return nil
	})
	p.Secrets["token"] = "s3cret"
	sent := p.Send(sdktest.Get("https://api.example.com/user"))
	fmt.Println(sent.Header.Get("Authorization"))
	// Output: Bearer s3cret
}

// The configuration comes from the rule, and is checked when the rule is set.
func ExampleServe() {
	type config struct {
		Header string `json:"header"`
	}
	sdk.Serve(func(c config) (sdk.Policy, error) {
		if c.Header == "" {
			return sdk.Policy{}, errors.New(`"header" is missing`)
		}
		return sdk.Policy{Request: func(r *sdk.Request) error {
			r.Header.Set(c.Header, "yes")
			return nil
		}}, nil
	})
	_, err := sdktest.Start(`{}`)
	fmt.Println(err)
	p, err := sdktest.Start(`{"header":"X-Reviewed"}`)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(p.Send(sdktest.Get("https://api.example.com/")).Header.Get("X-Reviewed"))
	// Output:
	// config: "header" is missing
	// yes
}

// Secret returns a reference. The node replaces it with the secret after the policy has run.
func ExampleSecret() {
	p := start(func(r *sdk.Request) error {
		key, err := sdk.Secret("key")
		if err != nil {
			return err
		}
		fmt.Println("the policy sees the secret:", strings.Contains(key, "s3cret"))
		r.SetURI(r.Path() + "?key=" + key)
		return nil
	})
	p.Secrets["key"] = "s3cret"
	fmt.Println(p.Send(sdktest.Get("https://api.example.com/search")).URI)
	// Output:
	// the policy sees the secret: false
	// /search?key=s3cret
}

func ExampleBasic() {
	p := start(func(r *sdk.Request) error {
		value, err := sdk.Basic("agent", "password")
		if err != nil {
			return err
		}
		r.Header.Set("Authorization", value)
		return nil
	})
	p.Secrets["password"] = "s3cret"
	sent := p.Send(sdktest.Get("https://git.example.com/"))
	user, password, _ := (&http.Request{Header: sent.Header}).BasicAuth()
	fmt.Println(user, password)
	// Output: agent s3cret
}

// The policy responds itself, and the request is not sent.
func ExampleRequest_Respond() {
	p := start(func(r *sdk.Request) error {
		if r.Path() == "/health" {
			return r.Respond(200, "text/plain", []byte("ok"))
		}
		return nil
	})
	got := p.Send(sdktest.Get("https://api.example.com/health"))
	fmt.Println(got.Response.StatusCode, got.ResponseBody)
	// Output: 200 ok
}

func ExampleDeny() {
	p := start(func(r *sdk.Request) error {
		if r.Method() != "GET" {
			return sdk.Deny("this sandbox may only read")
		}
		return nil
	})
	got := p.Send(sdktest.Request("POST", "https://api.example.com/", "{}"))
	fmt.Println(got.Denied, got.Reason)
	// Output: true this sandbox may only read
}

// A budget of two requests an hour for each sandbox, over all instances of the module.
func ExampleKVAdd() {
	p := start(func(r *sdk.Request) error {
		sandbox, err := sdk.CurrentSandbox()
		if err != nil {
			return err
		}
		n, err := sdk.KVAdd("requests/"+sandbox.ID, 1, time.Hour)
		if err != nil {
			return err
		}
		if n > 2 {
			return sdk.Deny("the budget of this hour is used up")
		}
		return nil
	})
	for range 3 {
		got := p.Send(sdktest.Get("https://api.example.com/"))
		if got.Denied {
			fmt.Println("denied:", got.Reason)
		} else {
			fmt.Println("sent")
		}
	}
	// Output:
	// sent
	// sent
	// denied: the budget of this hour is used up
}

// A signature of the path, with a key that the policy does not hold.
func ExampleHMACSHA256() {
	p := start(func(r *sdk.Request) error {
		mac, err := sdk.HMACSHA256("key", "", []byte(r.Path()))
		if err != nil {
			return err
		}
		r.Header.Set("X-Signature", fmt.Sprintf("%x", mac[:4]))
		return nil
	})
	p.Secrets["key"] = "s3cret"
	fmt.Println(p.Send(sdktest.Get("https://api.example.com/user")).Header.Get("X-Signature"))
	// Output:
	// 8b37fec1
}
