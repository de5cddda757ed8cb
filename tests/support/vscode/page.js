// The part of VS Code's notebooks that shows widgets, in a page of its own: the Jupyter extension's widget manager, as
// its package ships it, over the kernel connection that the extension uses, too. Beside it stands what the extension does
// around them: it registers a widget's script with requirejs, and renders the outputs of cells.

import { KernelManager, ServerConnection } from "@jupyterlab/services";

const WIDGET = "application/vnd.jupyter.widget-view+json";
const problems = [];

/** As `ScriptManager` of the extension: the script of a widget is in a folder of its name below nbextensions. */
const loader = {
  widgetsRegisteredInRequireJs: new Set(),
  async loadWidgetScript(name) {
    requirejs.config({ paths: { [name]: `${location.origin}/vscode/nbextensions/${name}/index` } });
    this.widgetsRegisteredInRequireJs.add(name);
  },
  successHandler() {},
  errorHandler(...what) {
    problems.push(what.join(" "));
  },
};

async function start() {
  const { activate } = await import("/vscode/ipywidgets.js");
  activate();
  vscIPyWidgets8.load();
  const serverSettings = ServerConnection.makeSettings({ baseUrl: `${location.origin}/`, wsUrl: `${location.origin.replace("http", "ws")}/` });
  const kernel = await new KernelManager({ serverSettings }).startNew({ name: "python3" });
  const widgets = new vscIPyWidgets.WidgetManager(kernel, document.body, loader, () => {});
  const shown = new Map();

  /** As `WidgetManager.renderWidget` of the extension. */
  async function renderWidget(data, element) {
    const model = await widgets.get_model(data.model_id);
    const view = await widgets.create_view(model, { el: element });
    await widgets.display_view(data, view, { node: element });
  }

  function render(data, element) {
    if (data[WIDGET]) renderWidget(data[WIDGET], element).catch((error) => problems.push(String(error)));
    else if (data["text/html"]) element.innerHTML = data["text/html"];
    else element.textContent = data["text/plain"];
  }

  kernel.iopubMessage.connect((_, { header, content }) => {
    if (header.msg_type === "update_display_data") {
      render(content.data, shown.get(content.transient.display_id));
    } else if (header.msg_type === "display_data" || header.msg_type === "execute_result") {
      const element = document.body.appendChild(document.createElement("div"));
      element.className = "output";
      shown.set(content.transient?.display_id, element);
      render(content.data, element);
    } else if (header.msg_type === "error") {
      problems.push(content.evalue);
    }
  });
  return (code) => void kernel.requestExecute({ code });
}

window.vscode = { problems, ready: start().then((run) => (window.vscode.run = run)) };
