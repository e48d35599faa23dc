// Package preset defines named lists of the hosts of code hosts, model APIs and
// installers, so that rules can name the service: `preset:github`. Operators define
// more of them, such as the package registries that their sandboxes use.
//
// A list has what the service's own clients connect to by default and nothing else.
// Hosts that strangers can have content on are left out unless the service does not work
// without them, as their descriptions state. Names are stable: stored rules have them.
package preset

import "slices"

// Prefix of a preset's name where a host pattern is expected. No host name has a colon.
const Prefix = "preset:"

// Source is the origin of a preset.
type Source string

const (
	// BuiltIn presets come with doze.
	BuiltIn Source = "built_in"
	// Node presets are the operator's, in the node's configuration.
	Node Source = "node"
)

// Preset is a named list of host patterns.
type Preset struct {
	Name        string   `json:"name"`
	Description string   `json:"description"`
	Hosts       []string `json:"hosts"` // names, and `*.example.com` for all below
	Source      Source   `json:"source" enum:"built_in,node"`
}

// All returns the presets that come with doze, in the order of their names.
func All() []Preset { return slices.Clone(builtIn) }

// builtIn presets in the order of their names.
var builtIn = []Preset{
	{"anthropic", "The Anthropic API", []string{"api.anthropic.com"}, BuiltIn},
	{"bitbucket", "Bitbucket Cloud: git over HTTPS and the API", []string{"bitbucket.org", "api.bitbucket.org"}, BuiltIn},
	{"deepseek", "The DeepSeek API", []string{"api.deepseek.com"}, BuiltIn},
	{"gemini", "Google's Gemini API", []string{"generativelanguage.googleapis.com"}, BuiltIn},
	{"github", "GitHub: git over HTTPS, the API, archives, releases, raw files and LFS. Anyone can publish content there", []string{
		"github.com", "api.github.com", "uploads.github.com", "codeload.github.com", "gist.github.com", "*.githubusercontent.com",
		"github-cloud.s3.amazonaws.com",
	}, BuiltIn},
	{"gitlab", "GitLab.com: git over HTTPS and the API", []string{"gitlab.com"}, BuiltIn},
	{"groq", "The Groq API", []string{"api.groq.com"}, BuiltIn},
	{"huggingface", "Hugging Face: models, data sets, the API and inference. Anyone can publish content there", []string{
		"huggingface.co", "*.huggingface.co", "*.hf.co",
	}, BuiltIn},
	{"mistral", "The Mistral API", []string{"api.mistral.ai"}, BuiltIn},
	{"nodejs", "Node.js releases and headers (nvm, node-gyp)", []string{"nodejs.org"}, BuiltIn},
	{"openai", "The OpenAI API", []string{"api.openai.com"}, BuiltIn},
	{"openrouter", "The OpenRouter API", []string{"openrouter.ai"}, BuiltIn},
	{"playwright", "Browsers that Playwright installs", []string{"cdn.playwright.dev", "playwright.download.prss.microsoft.com"}, BuiltIn},
	{"rustup", "Rust toolchains (rustup)", []string{"static.rust-lang.org"}, BuiltIn},
	{"xai", "The xAI API", []string{"api.x.ai"}, BuiltIn},
}
