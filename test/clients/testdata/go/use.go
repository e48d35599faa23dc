// Package use does with the generated client what a program would. It is compiled
// and not run.
package use

import (
	"context"
	"fmt"
	"io"
	"net/http"

	"clients/client"
)

func connect(token string) (*client.ClientWithResponses, error) {
	return client.NewClientWithResponses("https://doze.example.com/api/v1",
		client.WithRequestEditorFn(func(_ context.Context, r *http.Request) error {
			r.Header.Set("Authorization", "Bearer "+token)
			return nil
		}))
}

// Create returns the sandbox with this name, which exists afterwards.
func Create(ctx context.Context, c *client.ClientWithResponses, name string) (*client.Sandbox, error) {
	sleepAfter := "60s"
	response, err := c.CreateSandboxWithResponse(ctx, client.CreateSandboxJSONRequestBody{
		Name: &name, Labels: &map[string]string{"team": "web"}, SleepAfter: &sleepAfter,
	})
	switch {
	case err != nil:
		return nil, err
	case response.JSON201 != nil:
		return response.JSON201, nil
	case response.JSON200 != nil:
		return response.JSON200, nil
	case response.ApplicationproblemJSONDefault != nil:
		return nil, problem(response.ApplicationproblemJSONDefault)
	}
	return nil, fmt.Errorf("status %d", response.StatusCode())
}

func problem(p *client.Problem) error {
	switch p.Code {
	case "sandbox_not_found":
		return io.EOF
	case "request_invalid":
		if p.Errors != nil {
			for _, e := range *p.Errors {
				return fmt.Errorf("%s: %s", e.Location, e.Message)
			}
		}
	}
	return fmt.Errorf("%s: %s", p.Code, p.Detail)
}

func Run(ctx context.Context, c *client.ClientWithResponses, id string, argv ...string) (string, error) {
	timeout := "10s"
	response, err := c.ExecWithResponse(ctx, id, client.ExecJSONRequestBody{Argv: &argv, Timeout: &timeout})
	switch {
	case err != nil:
		return "", err
	case response.JSON200 == nil:
		return "", fmt.Errorf("status %d", response.StatusCode())
	case response.JSON200.ExitCode != 0:
		return response.JSON200.Stderr, nil
	}
	return response.JSON200.Stdout, nil
}

func ListAsleep(ctx context.Context, c *client.ClientWithResponses) (names []string, err error) {
	var cursor *string
	for {
		response, err := c.ListSandboxesWithResponse(ctx, &client.ListSandboxesParams{Label: &[]string{"team=web"}, Cursor: cursor})
		if err != nil || response.JSON200 == nil {
			return nil, err
		}
		for _, sandbox := range response.JSON200.Sandboxes {
			if sandbox.State == "asleep" {
				names = append(names, sandbox.Name)
			}
		}
		if cursor = response.JSON200.NextCursor; cursor == nil {
			return names, nil
		}
	}
}

func Expose(ctx context.Context, c *client.ClientWithResponses, id string, port int32) (string, error) {
	response, err := c.ExposePortWithResponse(ctx, id, client.ExposePortJSONRequestBody{Port: port})
	if err != nil || response.JSON200 == nil {
		return "", err
	}
	return response.JSON200.Url, nil
}

func Upload(ctx context.Context, c *client.ClientWithResponses, id, path string, content io.Reader) error {
	_, err := c.WriteFileWithBodyWithResponse(ctx, id, &client.WriteFileParams{Path: &path}, "application/octet-stream", content)
	return err
}
